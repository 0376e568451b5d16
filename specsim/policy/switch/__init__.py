"""Policies that choose the drafter of every round, a file each."""
