"""The protocol of the ranks: a rendezvous before each collective, in bounded time; failures; hosts."""
