"""Self-supervised methods; each file has head, loss, memory and hook points of one."""
