"""The audit: whether what was promised holds, counted from the log and compared with the bus. It changes nothing.

audit.py       the way of a look: ledgers, ends, records, events, ledgers again, states; what is confirmed
reading.py     a stretch of the log, up to ends that were taken before
books.py       strong: each record's settling, in a few bytes a record (pure)
projection.py  semantic: states and streams on the bus against the fold of the log; repair
ids.py         a set of ids in little memory
report.py      what comes of it: accounts, breaches, what each of them means
show.py        a report for people
metrics.py     a patrol's metrics
"""
