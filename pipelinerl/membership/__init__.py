"""Which roles take part in a run, and where: each role renews a lease, which all others can read.

`lease` has the record and the pure decisions, `stores` hold the leases, `registration` renews a role's own, `watch`
follows the others', `address` and `joining` let a role start alone. Which server holds which weights is in the
trainer's messages alone.
"""
