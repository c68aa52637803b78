"""The fleet's side, in the order in which a job meets it. Knows schemas and transports.

worker.py      the life of a worker: its model, its group, its claims, its end
intake.py      from records to prepared jobs; door.py says what is wrong with a record
held.py        a job in hand, and the events that tell what becomes of it
desk.py        the jobs in hand, between claims and engine
schedule.py    which sequences are decoded in a step; pure
engine/        the models, and the thread that runs them
stream.py      tokens to the bus
commit.py      events, offsets and ledger to the log
presence.py    saying that the worker lives
projector.py   a process of its own: from the log to states and the ends of streams
metrics.py     what can be measured here, each as the question it answers
"""
