"""Deterministic simulation: the fleet's own code on virtual time, broken by faults that a seed draws.

After the manner of FoundationDB and TigerBeetle. Worker, projector, relay, client and readers run unchanged, above the
embedded adapters, which run unchanged, too; only what lies beneath those is simulated: the event loop, the database
behind each of the two files, the bells and signs of life between processes, the engine's thread.

    loop.py      an event loop whose time is virtual, and hosts that can be killed and frozen between any two callbacks
    files.py     a database that processes share, with latency, lost replies and lost requests
    fleet.py     the simulated processes: how each is built from the fleet's own parts
    faults.py    what happens to them, drawn from a seed
    watch.py     what must hold after every commit
    scenario.py  one run: a load, a storm, calm, a verdict
"""
