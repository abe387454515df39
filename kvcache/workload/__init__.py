"""Workloads for a cache: traces, a generator of chats, and an engine that plays them and checks every reused byte."""
