"""Cases of the peers."""

ADAPTERS = {}
DECLARED = {}
