"""Judgement: does mixed precision pay here, and is the model still right?"""
