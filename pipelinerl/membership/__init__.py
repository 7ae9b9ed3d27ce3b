"""Who takes part in a run, alive and where: each role renews a lease, everybody else sees whose lease holds.

`lease` is the record and the pure decisions, `stores` and `redis` hold the leases, `registration` renews one's own,
`watch` follows those of others, `address` and `joining` let a role start alone. A lease says that a role lives and
where it listens. Which server holds which weights is said by the trainer's messages alone.
"""
