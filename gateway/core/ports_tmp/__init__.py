"""TODO gateway/core/ports_tmp"""
