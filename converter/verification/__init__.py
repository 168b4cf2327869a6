"""When a rewrite is accepted: what is checked before anything runs, what is run, and what must hold.

`frame` checks a `Rewrite` without running it; `region` cuts out both versions as models; `examine` has a worker run
them (`trial`, on ordinary and on `extremes` of inputs) and judges the figures by the rewrite's `check`; the outcome is
a `Proof` in the site's `verdict`. In the end, `audit` finds changes that nothing verified, and `whole` compares the
converted model with the original.
"""
