"""`filter_jit`, its stages and donation."""

from .jit import filter_jit as filter_jit
from .report import DonationReport as DonationReport
from .retrace import Retrace as Retrace
