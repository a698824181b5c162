"""`onecard prepare NAME --check`: is it what it says, and what is in it?"""
