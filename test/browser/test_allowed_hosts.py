"""Which hosts a browser may reach: FAULTS A20."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_envs.browser.allowed_hosts import AllowedHosts, is_public


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


EMBEDDINGS = {  # where the 32 bits of an IPv4 address stand in an IPv6 address of 128
    "mapped": lambda v4: 0xFFFF << 32 | v4,
    "compatible": lambda v4: v4,
    "translated": lambda v4: 0xFFFF << 48 | v4,
    "NAT64": lambda v4: 0x64FF9B << 96 | v4,
    "6to4": lambda v4: 0x2002 << 112 | v4 << 80 | 1,
    "Teredo, its client": lambda v4: 0x20010000 << 96 | 0x08080808 << 64 | v4 ^ 0xFFFFFFFF,
    "Teredo, its server": lambda v4: 0x20010000 << 96 | v4 << 64 | 0x08080808 ^ 0xFFFFFFFF,
    "ISATAP": lambda v4: 0x26064700 << 96 | 0x5EFE << 32 | v4,
    "ISATAP, unique": lambda v4: 0x26064700 << 96 | 0x02005EFE << 32 | v4,
}
PRIVATE = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.168.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
]


@pytest.mark.parametrize("kind", EMBEDDINGS)
@given(private=st.sampled_from(PRIVATE).flatmap(lambda network: st.ip_addresses(network=network)))
def test_an_address_that_hides_in_another_is_not_public(kind, private):
    address = IPv6Address(EMBEDDINGS[kind](int(private)))
    assert not is_public(str(address))
    assert not AllowedHosts(["*"]).allows(f"[{address}]", 443)


@pytest.mark.parametrize("kind", ["mapped", "NAT64", "6to4", "ISATAP"])
def test_an_address_that_hides_a_public_one_is_public(kind):
    assert is_public(str(IPv6Address(EMBEDDINGS[kind](int(IPv4Address("8.8.8.8"))))))


@pytest.mark.parametrize(
    "address",
    [
        *("::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "2002:7f00:1::"),
        *("64:ff9b:1::808:808", "fec0::1", "2001:0:808:808::", "fe80::5efe:808:808", "ff02::1"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)
    assert AllowedHosts(["*"]).refusal(f"http://[{address}]/") is not None


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
