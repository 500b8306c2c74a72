"""What Prometheus and Grafana are given: a dashboard, alert rules, and the files that start both."""
