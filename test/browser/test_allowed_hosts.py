"""Which hosts a browser may reach: FAULTS A20."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_envs.browser.proxy import AllowedHosts, is_public

P = "8.8.8.8"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://example.com/", True),
        ("https://example.com/x?y=1#z", True),
        ("https://EXAMPLE.com./", True),
        ("https://www.example.com", True),
        ("http://127.0.0.1:8000/", True),
        ("https://example.com:8443/", False),
        ("http://evilexample.com/", False),
        ("http://example.com.evil.com/", False),
        ("http://example.com@evil.com/", False),
        ("http://evil.com@example.com/", False),
        ("http://user:pass@example.com/", False),
        ("http://evil.com\\@example.com/", False),
        ("http://evil.com/?example.com", False),
        ("http://evil.com/#example.com", False),
        ("http://example.com%2eevil.com/", False),
        ("http://example.com%00.evil.com/", False),
        ("http://127.0.0.1/", False),
        ("http://127.0.0.1:8001/", False),
        ("http://2130706433:8000/", False),
        ("http://0x7f000001:8000/", False),
        ("http://0177.0.0.1:8000/", False),
        ("http://127.1:8000/", False),
        ("http://[::1]:8000/", False),
        ("http://[::ffff:127.0.0.1]:8000/", False),
        ("http://[::", False),
        ("http://example.com:99999/", False),
        ("file:///etc/passwd", False),
        ("ftp://example.com/", False),
        ("javascript:fetch('http://example.com')", False),
        ("data:text/html,x", False),
        ("view-source:http://example.com/", False),
        ("chrome://settings", False),
        ("//example.com/", False),
        ("example.com", False),
        ("", False),
    ],
)
def test_urls(url, allowed):
    hosts = AllowedHosts(["example.com", "127.0.0.1:8000"])
    assert (hosts.refusal(url) is None) == allowed


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.org", True),
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("", False),
    ],
)
def test_all_public_hosts(host, allowed):
    hosts = AllowedHosts(["*"])
    assert hosts.allows(host, 443) == allowed
    assert not hosts.allows(host, 22)
    assert AllowedHosts(["*", "10.0.0.1"]).allows("10.0.0.1", 80)


def test_an_address_that_hides_in_another_is_not_public():
    assert is_public("8.8.8.8")
    assert not is_public("::ffff:10.0.0.1")


def in_every_way(inner):
    """An IPv4 address inside IPv6 ones, as its RFC writes it."""
    number = int(ipaddress.IPv4Address(inner))
    high, low = number >> 16, number & 0xFFFF
    return [
        *(f"::{inner}", f"::ffff:{inner}", f"::ffff:0:{inner}", f"64:ff9b::{inner}"),
        *(f"2002:{high:x}:{low:x}::", f"2002:{high:x}:{low:x}::1"),
        f"2001:0:808:808::{high ^ 0xFFFF:x}:{low ^ 0xFFFF:x}",  # Teredo, by a public server
        f"2001:0:{high:x}:{low:x}::{0x0808 ^ 0xFFFF:x}:{0x0808 ^ 0xFFFF:x}",
        *(f"2606:4700::5efe:{inner}", f"2606:4700::200:5efe:{inner}"),
    ]


@pytest.mark.parametrize("inner", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1"])
def test_no_way_of_writing_a_private_address_is_public(inner):
    assert [each for each in in_every_way(inner) if is_public(each)] == []


def test_what_only_translates_a_public_address_is_public():
    translating = [f"::{P}", f"::ffff:{P}", f"::ffff:0:{P}", f"64:ff9b::{P}"]
    assert [each for each in translating if not is_public(each)] == []
    assert is_public("2606:4700::1111")
    assert not is_public("64:ff9b:1::1")  # of local use


@pytest.mark.parametrize(
    ("domains", "error", "says"),
    [
        ([], ValueError, "is empty"),
        ("example.com", TypeError, "a list of hosts"),
        (["https://example.com"], ValueError, "'https://example.com' is no host"),
        (["example.com/path"], ValueError, "no host"),
        (["a@example.com"], ValueError, "no host"),
        ([""], ValueError, "no host"),
        (["example.com:99999"], ValueError, "no host"),
        (["*.example.com"], ValueError, "no host"),
    ],
)
def test_bad_domains(domains, error, says):
    with pytest.raises(error, match=says):
        AllowedHosts(domains)


@given(st.text(max_size=40) | st.text(alphabet="htp:/@.example\\com#?[]%0", max_size=40))
def test_no_url_is_allowed_by_accident(text):
    """Whatever is allowed goes to the host, as another parser reads it."""
    from yarl import URL

    hosts = AllowedHosts(["example.com"])
    if hosts.refusal(text) is None:
        host = (URL(text).raw_host or "").rstrip(".")
        assert host == "example.com" or host.endswith(".example.com")
