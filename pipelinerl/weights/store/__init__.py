"""Weight versions as files in a shared folder or at any fsspec URL, for `weights.backend=store`.

Every trainer rank writes its stripe of a version to a file of its own. When all are durable, rank 0 replaces the
manifest, which alone says what is published. Servers look at the manifest, fetch what they lack beside generation, and
swap it in like pushed weights. Nobody connects to the trainer.

| end     | module      | owns                                                                           |
|---------|-------------|--------------------------------------------------------------------------------|
| both    | `manifest`  | the published versions, signed, and which steps lead a server to the newest. Pure |
| both    | `files`     | the folder or URL: durable writes, bounded reads                                  |
| trainer | `publisher` | which files make up the newest version, and which may be removed                  |

`publish.store_delivery` publishes versions here, and learns from the servers' reports who serves which.
`load.store_follower` looks for newer versions and has its server take them.
"""
