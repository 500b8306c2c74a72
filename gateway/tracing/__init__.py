"""OpenTelemetry traces of calls. What is imported while traces are off imports nothing of OpenTelemetry."""
