"""Environment parity: is the last digit odd?"""
