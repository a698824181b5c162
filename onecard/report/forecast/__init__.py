"""Where a run will end, from the part of its curve that is there: laws that know the learning rate, with what
published runs say about their constants."""

from onecard.report.forecast.outlook import forecast_of

__all__ = ["forecast_of"]
