"""What a call is expected to take where nothing was measured: times that were measured elsewhere, carried over.

A call takes as long as its host or its device, whichever is longer, and more where they are close. The host's part
follows from what the call says. The device's part is the time on the roofline over an efficiency, which is interpolated
between the problems of ``fixtures/results`` whose times are known: kriging (Rasmussen and Williams 2006, section 2.2),
with the covariance exp(-distance) between the ``features`` of two problems. ``fixtures/fit_forecast.py`` makes the
table. What this machine has measured corrects it.
"""

from attnswitch.planning.forecast.predict import Forecast, forecast, of_itself

__all__ = ["Forecast", "forecast", "of_itself"]
