"""Tests of environments: the conformance test and scripted turns."""
