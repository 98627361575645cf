{{/* The file cluster.yaml. */}}
{{- define "pd-coordinator.clusterYaml" -}}
{{- toYaml .Values.config -}}
{{- end -}}

{{/* Container ports as YAML: name and number. */}}
{{- define "pd-coordinator.ports" -}}
{{- $server := .Values.config.server -}}
- name: http
  containerPort: {{ $server.port | default 1025 | int64 }}
- name: management
  containerPort: {{ $server.management_port | default 1026 | int64 }}
{{- with $server.metrics_port }}
- name: metrics
  containerPort: {{ . | int64 }}
{{- end }}
{{- with $server.status_port }}
- name: status
  containerPort: {{ . | int64 }}
{{- end }}
{{- end -}}

{{/* "https" where the configuration has a certificate for a port: data or management. Takes the values and the port's name. */}}
{{- define "pd-coordinator.scheme" -}}
{{- $port := get ((index . 0).config.tls | default dict) (index . 1) | default dict -}}
{{- ternary "https" "http" (not (not $port.cert_file)) -}}
{{- end -}}

{{/* Names of the ports beside the data port, as a YAML list. */}}
{{- define "pd-coordinator.managementPorts" -}}
- management
{{- if .Values.config.server.metrics_port }}
- metrics
{{- end }}
{{- if .Values.config.server.status_port }}
- status
{{- end }}
{{- end -}}

{{/* The port that has /metrics. */}}
{{- define "pd-coordinator.metricsPort" -}}
{{- ternary "metrics" "management" (not (not .Values.config.server.metrics_port)) -}}
{{- end -}}

{{/* Paths that Prometheus scrapes there, as a YAML list. */}}
{{- define "pd-coordinator.metricsPaths" -}}
- /metrics
{{- $engines := get (.Values.config.metrics | default dict) "engines" | default dict -}}
{{- if and .Values.serviceMonitor.engineMetrics $engines.scrape }}
- /metrics/engines
{{- end }}
{{- end -}}

{{/* "yes" where engines bear one coordinator only: MindIE's decode instances have one result stream, and engines that call
     back know one address. */}}
{{- define "pd-coordinator.exclusive" -}}
{{- $cluster := .Values.config.cluster | default dict -}}
{{- $usual := $cluster.engine | default "mindie" -}}
{{- $engines := ternary (list) (list $usual) (gt (len ($cluster.instances | default list)) 0) -}}
{{- range $cluster.instances -}}
{{- if ne .role "hybrid" -}}
{{- $engines = append $engines (.engine | default $usual) -}}
{{- end -}}
{{- end -}}
{{- if or (has "mindie" $engines) .Values.enginePorts -}}yes{{- end -}}
{{- end -}}

{{/* Seconds that a pod gets to end. */}}
{{- define "pd-coordinator.gracePeriod" -}}
{{- $timeouts := .Values.config.timeouts | default dict -}}
{{- $drain := ternary $timeouts.drain_s 30 (hasKey $timeouts "drain_s") | float64 -}}
{{- $own := .Values.terminationGracePeriodSeconds -}}
{{- if and (eq $drain 0.0) (kindIs "invalid" $own) -}}
{{- fail "config.timeouts.drain_s is 0 (no limit): say with terminationGracePeriodSeconds how long a pod may take to end" -}}
{{- end -}}
{{- $least := add (.Values.preStopSleepSeconds | int64) (ceil $drain | int64) 10 -}}
{{- if and (not (kindIs "invalid" $own)) (lt ($own | int64) $least) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but preStopSleepSeconds + config.timeouts.drain_s + 10 is %d: requests would be cut off" ($own | int64) $least) -}}
{{- end -}}
{{- ternary $least ($own | int64) (kindIs "invalid" $own) -}}
{{- end -}}

{{/* Peers of a NetworkPolicy for each instance whose URL has an address in it. */}}
{{- define "pd-coordinator.instanceBlocks" -}}
{{- $blocks := list -}}
{{- range (.Values.config.cluster | default dict).instances -}}
{{- $url := .url | default "" -}}
{{- if regexMatch "^https?://\\[[0-9a-fA-F:.]+\\](:|$)" $url -}}
{{- $blocks = append $blocks (printf "%s/128" (regexFind "[0-9a-fA-F:.]+\\]" $url | trimSuffix "]")) -}}
{{- else if regexMatch "^https?://[0-9]+[.][0-9]+[.][0-9]+[.][0-9]+(:|$)" $url -}}
{{- $blocks = append $blocks (printf "%s/32" (regexFind "[0-9]+[.][0-9]+[.][0-9]+[.][0-9]+" $url)) -}}
{{- end -}}
{{- end -}}
{{- range $blocks | uniq }}
- ipBlock:
    cidr: {{ . | quote }}
{{- end -}}
{{- end -}}
