"""A real Kafka and a real Redis for tests and the demo, without containers.

pair.py      both together: for one process, or shared by several
kafka.py     the broker: its jars from Maven Central (pom.xml), one KRaft node
redis.py     redis-server, in memory only
process.py   a server process that dies with its parent

`python -m arriero.ops.testbed` runs the pair until Ctrl-C.
"""

from arriero.ops.testbed.kafka import Broker, kafka_jars
from arriero.ops.testbed.pair import Pair, cache_folder, missing, run_pair, share_pair
from arriero.ops.testbed.redis import RedisServer

__all__ = ["Broker", "Pair", "RedisServer", "cache_folder", "kafka_jars", "missing", "run_pair", "share_pair"]
