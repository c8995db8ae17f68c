"""What `launch/benchmark.py` is made of: shapes, random weights, systems to compare, timing, results, the plot."""
