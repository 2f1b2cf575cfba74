"""Agreement between ranks, and requests that reach one rank and are meant for all."""
