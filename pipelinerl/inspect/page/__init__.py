"""One self-contained page about one or several runs: `pipelinerl report RUN [RUN2 …]`.

It draws its charts itself as inline SVG: a plotting library would take 1 MB (Bokeh) to 4.5 MB (Plotly) of its 5 MB.
"""
