"""A load balancer that knows which worker has which prefix, beside one that does not. README.md tells the story.

======================  ====================================================================
`inbox`, `clock`        what an engine serves next; simulated time, and what a step costs
`serving`, `worker`     an engine that is fed while it runs; it as a process that speaks HTTP
`fleet`                 the processes: started, killed, started again
`index`, `feed`         which worker has which blocks; the thread that hears it from all workers
`member`, `policies`    a worker as the balancer sees it; which one a request goes to
`balancer`, `service`   a request's way there and back, and to another worker; all of it over HTTP
`player`, `tally`       the users; what has become of their requests
`rounds`                one fleet, one policy, one trace
`page`, `table`         what people see of it; `server`: uvicorn as a part of a program
======================  ====================================================================
"""
