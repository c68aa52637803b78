"""How records travel. Knows `schemas` and nothing else of ours.

log.py       the job log seam: topics, claims, transactional commits
bus.py       the token bus seam: streams, states, presence
ledger.py    what of a partition is settled (pure)
lineage.py   which text is whose (pure)
kafka/  redis/  embedded/    the adapters
inbox.py     a follower's messages
connect.py   from an address to an adapter
"""
