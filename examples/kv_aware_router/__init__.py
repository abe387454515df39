"""KV-aware load balancing compared with round robin, on worker processes. README.md explains it.

======================  ====================================================================
`inbox`, `clock`        queue of an engine; simulated time and the cost of a step
`serving`, `worker`     an engine that accepts requests while it runs; its process, with HTTP
`fleet`                 worker processes: start, kill, restart
`index`, `feed`         which worker has which blocks; the thread that reads the workers' feeds
`member`, `policies`    a worker as the balancer sees it; choice of the worker for a request
`balancer`, `service`   routing, with a retry on another worker; its HTTP interface
`player`, `tally`       client that plays a trace; counts and latencies of its requests
`rounds`                one run of a trace with one policy and one fleet
`page`, `table`         results in a browser and on a terminal; `server`: embedded uvicorn
======================  ====================================================================
"""
