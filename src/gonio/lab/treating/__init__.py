"""Treatments: from a finding to a change of the model that is kept if it is proved to help and to do no harm."""
