"""Servers for engines that call the coordinator: sockets in, calls of methods out."""
