"""The job log on Apache Kafka, by aiokafka.

log.py          the seam's front: topics, publishing, lookups
membership.py   one worker in one consumer group: the consumer, rebalances, which partition is ours
taking.py       how a partition is taken: fence, ledger, raised fence
rebuilding.py   a ledger that is gone, from the events topic
claim.py        one partition under one fence: read, commit, release
producing.py    the producers: one transactional producer a claim, one idempotent one to publish
tailing.py      committed records as they come, without a group
backlog.py      what is not settled yet
topics.py       topics made and checked
connection.py   single requests to brokers; errors become ours here
stable_offsets.py  a request that aiokafka lacks
closing.py      ends aiokafka's clients in bounded time
"""
