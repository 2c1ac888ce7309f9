"""A whole run, from the plan to the report; kernels run in other processes, so that a crash or a hang is a finding.

plan        what to do                      whole       the phases of a run, and what fails in them
pool        jobs, here or in workers        process     a worker as its parent sees it
worker      the process kernels run in      journal     the case about to run, on disk
explore     one job: Hypothesis draws       reduce      smaller cases, where Hypothesis cannot shrink
order       the jobs of new cases           shard       those of one of several machines
events      what workers tell               tally       what is counted; coverage: situations met
counting    what a case counts for, in a run and in a log
corpus      saved cases                     provenance  versions and devices of a result
apart       a single case in a worker
"""
