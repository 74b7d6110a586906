"""Hosts that a task lists: which connections they allow."""

import pytest

from torchrl_envs.harbor.allowed_network import ListedHosts

LISTED = ["Example.com.", "*.pypi.org", "192.0.2.7", "10.0.0.0/8", "2001:db8::/32"]


@pytest.mark.parametrize(
    ("host", "is_allowed", "may_be_private"),
    [
        ("example.com", True, False),
        ("EXAMPLE.com.", True, False),
        ("www.example.com", False, False),  # a name is that host alone
        ("notexample.com", False, False),
        ("files.pypi.org", True, False),
        ("a.b.pypi.org", True, False),
        ("pypi.org", False, False),
        ("xpypi.org", False, False),
        ("192.0.2.7", True, True),
        ("192.0.2.8", False, False),
        ("10.255.0.1", True, True),
        ("[2001:db8::1]", True, True),
        ("2001:db9::1", False, False),
        ("0xa.0.0.1", False, False),  # an address in another notation is a name
    ],
)
def test_hosts(host, is_allowed, may_be_private):
    listed = ListedHosts(LISTED)
    assert (listed.allows(host, 8443), listed.names(host, 8443)) == (is_allowed, may_be_private)


def test_none_is_allowed_where_none_is_listed():
    assert not ListedHosts([]).allows("example.com", 443)


@pytest.mark.parametrize(
    "host", ["http://x.org", "x.org:80", "a b", "*", "x.*.org", "10.0.0.1/8", ""]
)
def test_what_is_no_host_is_named(host):
    with pytest.raises(ValueError, match=r"allowed_hosts: .* is no name"):
        ListedHosts([host])
