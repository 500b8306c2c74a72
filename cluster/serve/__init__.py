"""Ray, Ray Serve and HAProxy as this cluster needs them."""
