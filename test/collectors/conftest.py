"""The one rule of the ledger that every test of a collector may ask for."""

import pytest


@pytest.fixture(scope="session")
def check_balance():
    """Asserts that all groups and tokens that were offered are accounted for."""

    def check(ledger):
        balance = ledger.balance
        ends = (balance.trained, balance.num_dropped, balance.returned, balance.in_flight)
        assert balance.offered == tuple(map(sum, zip(*ends, strict=True)))

    return check
