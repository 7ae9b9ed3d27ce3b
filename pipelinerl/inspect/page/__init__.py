"""One self-contained page about one or several runs: `pipelinerl report RUN [RUN2 …]`.

`data` turns a run folder into plain data, `browser` its rollouts, `build` both into one HTML file. The page draws its
charts itself, as inline SVG: it needs lines, hover and click, and the plotting libraries that registry packages carry
weigh one (Bokeh) to four and a half (Plotly) megabytes of the five that a report may have.
"""
