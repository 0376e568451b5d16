"""Policies that choose the drafter of every round, one file each."""
