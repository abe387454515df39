"""What both ends of a router feed set on their ZeroMQ sockets: keys, who may connect, which addresses are near."""
