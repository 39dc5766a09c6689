"""The conformance kit and toy plugins."""
