"""One save or one load on one rank: the only place where planning, staging, transfer and commit are wired together."""
