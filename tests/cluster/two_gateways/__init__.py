"""Tests of one server with two gateways. It is a package, so that a fixture can last as long as its tests."""
