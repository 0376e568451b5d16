"""Roofline costs: what passes of a model of this shape take on this hardware, from bytes and FLOPs."""
