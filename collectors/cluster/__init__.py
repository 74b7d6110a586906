"""Collection on a Ray cluster: collectors are actors, the ledger is one, rows are references."""
