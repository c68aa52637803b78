"""The client's side, in the order in which a job meets it.

client.py     the asyncio client: submit, stream, result, status, history, cancel
publish.py    from a job to the record that lies in its topic
follow.py     the reader: each token index once, then the recorded end
openai.py     OpenAI's dialect: request bodies, response objects, errors (pure)
batch.py      offline generation over a file; lines.py has its files, recorded.py its events
gateway/      the HTTP door
"""

from arriero.producer.client import Client, JobResult, Submitted
from arriero.producer.follow import Ended, Item, Reset, Tokens
from arriero.schemas.job import Job, Message, Sampling

__all__ = ["Client", "Ended", "Item", "Job", "JobResult", "Message", "Reset", "Sampling", "Submitted", "Tokens"]
