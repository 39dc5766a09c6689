"""Engine tables: samples from models that are sums of tables, in NumPy."""
