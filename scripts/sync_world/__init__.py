"""The outer sync of many replicas, in real processes over real groups but without Monarch and torchtitan.

Quick to start, to strike and to check.
"""
