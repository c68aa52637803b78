"""Log and bus of one machine: a data folder with two SQLite files, no other program.

shared.py  writer.py  bells.py  db.py   a SQLite file that several processes write, and its wake-ups
log.py                                  the job log's calls
records.py                              its topics and records
groups.py                               its members, who gets which partition, leases with their ledgers
peers.py  member.py  claim.py           signs of life; the seam's Membership and Claim
"""
