"""Messages and their codec, sockets, keys, and what a rank and its collector agree on."""
