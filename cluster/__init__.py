"""What runs where: the command line, the supervisor that decides, launchers that start processes, agents that end them.

`import alignedserve.cluster` imports nothing; only `actors`, `ray_launcher`, `app` and `ray_session` need ray.
"""
