"""Breaking a fleet of real processes on purpose, and counting what that costs: `arriero chaos`.

processes.py   the fleet's processes, to be killed, frozen and starved
proxy.py       the network between workers and brokers, to be cut and slowed
load.py        jobs that come steadily, and readers that note every token
arena.py       all of that around one pair of log and bus
faults.py      what can happen to it
verdict.py     what has to hold afterwards
run.py         one run: a fleet, a fault, a verdict
report.py      the matrix of all runs
"""
