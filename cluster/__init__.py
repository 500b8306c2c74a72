"""The command line, the supervisor, the launchers that start processes, and the node agents that end them.

`import alignedserve.cluster` imports nothing; only `actors`, `ray_launcher`, `app` and `ray_session` need ray.
"""
