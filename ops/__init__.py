"""Puts processes together; the only reader of environment, signals and the machine's clocks. Knows all the rest.

cli/           the command `arriero`
settings.py    what may be set, and from where
wiring.py      from settings to running parts
stack.py       `up`: several roles on one machine
supervisor.py  children that are restarted; child.py is their end, signals.py how they are stopped
logging.py     where log entries go
status.py      a stack at a glance
models.py      the catalogue of models, and files
demo.py        the demo
audit/         whether every promise holds
bench/         measurements, both sides in one run
testbed/       a real Kafka and a real Redis on a bare machine
setup/         what `make` runs before anything is installed
deploy/        containers
"""
