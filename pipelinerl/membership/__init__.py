"""Which roles take part in a run, and where: each role renews a lease, and all others see which leases are held.

`lease` has the record and the pure decisions, `stores` hold the leases, `registration` renews a role's own, `watch`
follows those of others, `address` and `joining` let a role start alone. A lease says that a role is alive and where it
listens. Only the trainer's messages say which server holds which weights.
"""
